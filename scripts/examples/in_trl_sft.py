"""A plan in TRL's SFTTrainer: torchrun --nproc-per-node 2 scripts/examples/in_trl_sft.py plan.json config.json

An SFTTrainer is a Trainer of transformers, and takes a plan as that does (in_hf_trainer.py). Its own loss is fused with
the head outside of the model, where no plan is; so the loss is the model's, which was planned. Samples here are ids
already: the tokenizer is one that an SFTTrainer wants to have.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from in_hf_trainer import PlannedTrainer, Sequences, marked_as_sharded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, default_data_collator
from trl import SFTConfig, SFTTrainer

import tpplan


class PlannedSFTTrainer(PlannedTrainer, SFTTrainer):
    """An SFTTrainer whose ranks read the rows that a plan gives them, and whose loss is the model's own."""

    compute_loss = Trainer.compute_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("config", help="config.json of the planned model")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    plan = tpplan.Plan.load(args.plan)
    options = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=plan.batch.micro_batch,
        gradient_accumulation_steps=plan.batch.accumulation_steps,
        gradient_checkpointing=False,  # the plan says what is recomputed
        max_steps=args.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    device = options.device  # makes the process group
    config = AutoConfig.from_pretrained(args.config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device)
    model = marked_as_sharded(tpplan.apply_plan(model, plan), plan)
    data = Sequences(args.steps * plan.batch.global_batch, plan.batch.seq_len, config.vocab_size)
    rows = Dataset.from_list([{name: ids.tolist() for name, ids in data[i].items()} for i in range(len(data))])
    trainer = PlannedSFTTrainer(
        plan=plan,
        model=model,
        args=options,
        train_dataset=rows,
        data_collator=default_data_collator,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"pad": 0})), pad_token="pad"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
