"""How a handler says no."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from emulators.prime.web import Answer, Request, json_answer

B = TypeVar("B", bound=BaseModel)


class AnswerError(Exception):
    """An answer other than success that a correct client may get too: 404 after a lost delete, say."""

    def __init__(self, status: int, detail: Any, body: Any = None) -> None:
        super().__init__(str(detail))
        self.status = status
        self.body = body if body is not None else {"detail": detail}

    def answer(self) -> Answer:
        return json_answer(self.body, self.status)


class RefusalError(AnswerError):
    """A request that no correct client sends; recorded, so that a test can assert that there was none."""


def parse(model: type[B], request: Request) -> B:
    """Return a request's JSON body as ``model``; raises `RefusalError` with 422 as FastAPI words it."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RefusalError(422, "the body is not application/json")
    try:
        return model.model_validate_json(request.body)
    except ValidationError as error:
        errors = [
            {"type": e["type"], "loc": ["body", *e["loc"]], "msg": e["msg"]}
            for e in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise RefusalError(422, errors) from error


class Query:
    """A request's query, which may hold ``allowed`` and nothing else."""

    def __init__(self, request: Request, *allowed: str) -> None:
        self._values = request.query
        unknown = set(self._values) - set(allowed)
        if unknown:
            raise RefusalError(422, f"unknown query parameters {sorted(unknown)}")

    def many(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def one(self, name: str) -> str | None:
        values = self._values.get(name, [])
        if len(values) > 1:
            raise RefusalError(422, f"the query parameter {name} is given {len(values)} times")
        return values[0] if values else None

    def number(self, name: str, default: int, largest: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        if not text.isdigit() or not 1 <= int(text) <= largest:
            raise RefusalError(422, f"{name} is a number from 1 to {largest}, not {text!r}")
        return int(text)

    def flag(self, name: str) -> bool | None:
        text = self.one(name)
        if text is not None and text.lower() not in {"true", "false"}:
            raise RefusalError(422, f"{name} is true or false, not {text!r}")
        return None if text is None else text.lower() == "true"
