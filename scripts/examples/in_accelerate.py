"""A plan in a loop of accelerate: torchrun --nproc-per-node 2 scripts/examples/in_accelerate.py plan.json

The planned model stays out of `prepare`, which would wrap it in DDP; the optimizer goes in. Micro-batches and their
number are the plan's, so accelerate is not told to accumulate: no_sync is tpplan's, and the loss is divided here.
"""

import argparse
import contextlib

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import tpplan
from scripts.examples import llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    plan, accelerator = tpplan.Plan.load(args.plan), Accelerator(cpu=not torch.cuda.is_available())

    torch.manual_seed(0)
    model = tpplan.apply_plan(llama.build_model().to(accelerator.device), plan)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))

    data = llama.example_inputs(args.steps * plan.batch.global_batch, plan.batch.seq_len)
    share = plan.batch_for(accelerator.process_index)
    dataset = TensorDataset(data["tokens"], data["targets"])
    loader = DataLoader(dataset, batch_sampler=tpplan.PlanSampler(share, len(dataset)))
    for step, micro_batches in enumerate(tpplan.by_step(loader, share)):
        total = torch.zeros((), device=accelerator.device)
        for number, (tokens, targets) in enumerate(micro_batches):
            is_last = number + 1 == len(micro_batches)
            inputs = {"tokens": tokens.to(accelerator.device), "targets": targets.to(accelerator.device)}
            with contextlib.nullcontext() if is_last else tpplan.no_sync(model):
                loss = llama.loss(model(inputs["tokens"]), inputs) / len(micro_batches)
                accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {accelerator.reduce(total, 'mean').item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
