"""Ids that are made: of batches, and of rollouts so that the same batch made again has the same ones."""

from __future__ import annotations

import hashlib
import re
import uuid

from producer.contract import ID_PATTERN

_MAX_ID = 128


def new_batch_id(prefix: str = "batch") -> str:
    """Return a fresh batch id that begins with ``prefix``."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def sample_rollout_id(batch_id: str, example_id: int | str, sample_index: int) -> str:
    """Return the id of one sample of one example of a batch: the same each time, so that submitting again is safe."""
    return safe_id(f"{batch_id}-{example_id}-{sample_index}")


def safe_id(text: str) -> str:
    """Return ``text`` as an id: as it is when it is one, else cleaned, with a digest so that ids stay different."""
    if re.match(ID_PATTERN, text) and not text.endswith("\n"):
        return text
    digest = "-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-") or "id"
    return clean[: _MAX_ID - len(digest)] + digest
