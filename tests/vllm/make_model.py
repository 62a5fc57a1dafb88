"""Make the two model folders of the test bed, without a download.

Both have a tiny Qwen3 (2 layers, hidden 128) and a byte-level BPE of 2048 tokens, trained on the standard library's own sources
(6 s).
Runs in the engine's environment.
``tiny-qwen3`` has no weights (``--load-format dummy``); its output hardly depends on the prompt.
``tiny-qwen3-rand`` has random weights wide enough (std 0.25) that its output depends on the KV cache, so that a test can detect
a wrong hand-off.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 2048
MAX_POSITIONS = 4096
PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEIGHT_STD = 0.25


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE.

    Every text can be encoded and some tokens are half a character, as in real models.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((source.read_text(errors="ignore") for source in sources), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[BEGIN, END],
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config(end_token: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=end_token,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
        torch_dtype="bfloat16",
    )


def save_without_weights(folder: Path) -> None:
    tokenizer = train_tokenizer()
    end_token = int(tokenizer.convert_tokens_to_ids(END))
    tokenizer.save_pretrained(folder)
    model_config(end_token).save_pretrained(folder)
    generation = {"eos_token_id": end_token, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def save_with_weights(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(source))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tiny-qwen3 and tiny-qwen3-rand.")
    parser.add_argument("root", type=Path, help="folder that the two model folders go into")
    root = parser.parse_args().root
    save_without_weights(root / "tiny-qwen3")
    save_with_weights(root / "tiny-qwen3", root / "tiny-qwen3-rand")


if __name__ == "__main__":
    main()
