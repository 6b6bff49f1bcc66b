"""What a worker accepts as a packed folder, and how paths are put in place."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from pathlib import Path

import pytest

from producer import packing
from workers.errors import InvalidRolloutError
from workers.harbor import task
from workers.harbor.task import relocated, relocated_bytes, unpack


def pack(*members: tarfile.TarInfo, content: bytes = b"") -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    return base64.b64encode(gzip.compress(buffer.getvalue())).decode()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_what_the_producer_packs_is_unpacked_as_it_was(tmp_path: Path) -> None:
    long = "/".join(["folder" * 10] * 5) + "/ä.bin"
    texts = {"a.txt": b"a", long: bytes(range(256)), "empty": b""}
    for name, content in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a.txt").chmod(0o700)
    files = unpack("tests", packing.pack("tests/", packing.walk(tmp_path)))

    assert {file.name: file.content for file in files} == texts
    assert [file.name for file in files if file.executable] == ["a.txt"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("/etc/passwd"), "'/etc/passwd' is no path below the folder"),
        (member("a/../../b"), "'a/../../b' is no path below the folder"),
        (member("."), "'.' is no path below the folder"),
        (member("link", tarfile.SYMTYPE, "/etc"), "'link' is no ordinary file"),
        (member("link", tarfile.LNKTYPE, "a"), "'link' is no ordinary file"),
        (member("device", tarfile.CHRTYPE), "'device' is no ordinary file"),
        (member("pipe", tarfile.FIFOTYPE), "'pipe' is no ordinary file"),
        (member("folder", tarfile.DIRTYPE), "'folder' is no ordinary file"),
        (member("sparse", tarfile.GNUTYPE_SPARSE), "'sparse' is no ordinary file"),
    ],
)
def test_only_ordinary_files_with_relative_paths_are_unpacked(bad: tarfile.TarInfo, message: str) -> None:
    with pytest.raises(InvalidRolloutError, match=r"environment_args\.tests: cannot be unpacked") as caught:
        unpack("tests", pack(bad))
    assert message in caught.value.message


def test_a_file_comes_once_and_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRolloutError, match="'a' comes twice"):
        unpack("tests", pack(member("a"), member("./a")))
    monkeypatch.setattr(task, "FILES_LIMIT", 1)
    with pytest.raises(InvalidRolloutError, match="more than 1 files"):
        unpack("tests", pack(member("a"), member("b")))


@pytest.mark.parametrize("packed", ["%", "", base64.b64encode(b"no gzip").decode(), "H4sIAAAA"])
def test_what_is_no_archive_is_refused(packed: str) -> None:
    with pytest.raises(InvalidRolloutError, match=r"environment_args\.tests: cannot be unpacked"):
        unpack("tests", packed)


def test_a_zip_bomb_is_not_inflated() -> None:
    bomb = gzip.compress(bytes(packing.UNPACKED_LIMIT * 2), 1)
    with pytest.raises(InvalidRolloutError, match="more than 67108864 bytes, or cut off"):
        unpack("tests", base64.b64encode(bomb).decode())
    whole = base64.b64decode(pack(member("a"), content=b"x" * 100))
    with pytest.raises(InvalidRolloutError, match="cut off"):
        unpack("tests", base64.b64encode(whole[:-20]).decode())


def test_a_file_that_claims_more_than_there_is_is_refused() -> None:
    data = bytearray(gzip.decompress(base64.b64decode(pack(member("a"), content=b"x"))))
    header = tarfile.TarInfo("a")
    header.size = 1 << 30
    data[:512] = header.tobuf()
    with pytest.raises(InvalidRolloutError, match="unexpected end of data"):
        unpack("tests", base64.b64encode(gzip.compress(bytes(data))).decode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat /app/x '/tests' /logs", "cat R/app/x 'R/tests' R/logs"),
        ("A=/tmp/a:/root", "A=R/tmp/a:R/root"),
        ("http://host/app ./app/x $HOME/tests ~/logs ${D}/tmp", "http://host/app ./app/x $HOME/tests ~/logs ${D}/tmp"),
        ("/usr/app /application /tests.d /var/logs", "/usr/app /application /tests.d /var/logs"),
    ],
)
def test_the_formats_paths_are_put_below_the_root(text: str, expected: str) -> None:
    assert relocated(text, "R") == expected
    assert relocated(text, "") == text


def test_only_text_is_changed() -> None:
    assert relocated_bytes(b"/app", "R") == b"R/app"
    assert relocated_bytes(b"/app", "") == b"/app"
    for binary in (b"/app\x00", b"/app\xff"):
        assert relocated_bytes(binary, "R") == binary
