"""A tiny Llama on two processes that share every layer (tensor parallelism)."""
import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.cluster import DistCoordinator
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

VOCAB = 24


def collate(rows):
    """Repeats each motif to the length of the longest row."""
    longest = max(map(len, rows))
    ids = torch.tensor([(row * longest)[:longest] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def main():
    colossalai.launch_from_torch(seed=31)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=0, max_norm=1.0, parallel_output=False)
    booster = Booster(plugin=plugin)

    lengths = torch.randint(4, 9, (36,)).tolist()
    rows = [torch.randint(0, VOCAB, (n,)).tolist() for n in lengths]
    dataloader = plugin.prepare_dataloader(rows, batch_size=6, shuffle=True, collate_fn=collate)

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, 12)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )
    for epoch in range(2):
        dataloader.sampler.set_epoch(epoch)
        model.train()
        for batch in dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        coordinator.print_on_master(f"epoch {epoch} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
