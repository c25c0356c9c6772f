"""Trains with the Trainer of Hugging Face Transformers."""

from __future__ import annotations

import tempfile

import torch
from report import report
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 4


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sentences of eight tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (64, 8))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train, and say what came of it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
        trainer.train()
        report(
            "trainer",
            model,
            rank=arguments.process_index,
            local_rank=arguments.local_process_index,
            world_size=arguments.world_size,
            steps=trainer.state.global_step,
            environment=arguments.parallel_mode.value,
        )


if __name__ == "__main__":
    main()
