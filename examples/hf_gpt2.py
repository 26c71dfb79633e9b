"""GPT-2 from a Hugging Face config, trained from scratch on bytes with the loss of its own output.

python examples/hf_gpt2.py --strategy ddp --devices 2
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.text import ByteText


class Windows(Dataset):
    """Samples as Hugging Face models take them; the model shifts the labels itself."""

    def __init__(self, split: str, max_bytes: int = 2_000_000) -> None:
        self.text = ByteText(split, length=127, max_bytes=max_bytes)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, targets = self.text[index]
        window = torch.cat([inputs, targets[-1:]])
        return {"input_ids": window, "labels": window}


def gpt2(layers: int, width: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    result = unipar.fit(
        functools.partial(gpt2, layers=3, width=96),
        Windows("train"),
        strategy=args.strategy,
        devices=args.devices,
        optimizer={"name": "adamw", "lr": 1e-3},
        max_grad_norm=1.0,
        global_batch_size=16,
        steps=args.steps,
        eval_data=Windows("eval", max_bytes=60_000),
    )
    model = unipar.load_model(result.output_dir / "checkpoints", gpt2(layers=3, width=96))
    assert isinstance(model, GPT2LMHeadModel)
    prompt = torch.tensor([list(b"def ")])
    written = model.generate(prompt, max_new_tokens=40, do_sample=False)  # pyright: ignore
    print(f"evaluation loss {result.metrics['loss']:.3f} nats a byte")
    print("after 'def ' it writes:", repr(bytes(written[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main()
