"""Fine-tune a GPT-2 of Hugging Face under FSDP."""
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

from data import PaddingCollator, Sentences
from policies import fsdp_settings

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


def build(vocab_size, device):
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.to(device)
    return FSDP(model, **fsdp_settings(device))


def save_checkpoint(model, optimizer, scheduler, step):
    model_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    optim_state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank() == 0:
        torch.save(
            {
                "model": model_state,
                "optimizer": optim_state,
                "scheduler": scheduler.state_dict(),
                "step": step,
            },
            CHECKPOINT,
        )
    dist.barrier()


def load_checkpoint(model, optimizer, scheduler):
    checkpoint = torch.load(CHECKPOINT, map_location="cpu")
    set_model_state_dict(model, checkpoint["model"], options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(
        model,
        optimizer,
        optim_state_dict=checkpoint["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["step"]


def run(epochs, device, resume=False):
    set_seed(42)
    dataset = Sentences()
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=PaddingCollator())
    model = build(32, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
    step = load_checkpoint(model, optimizer, scheduler) if resume else 0
    for epoch in range(step // len(loader), epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        logger.info("epoch %d: loss %.4f", epoch, loss.item())
        save_checkpoint(model, optimizer, scheduler, step)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    run(3, device)
    run(4, device, resume=True)  # as a job does that was stopped
    dist.destroy_process_group()
