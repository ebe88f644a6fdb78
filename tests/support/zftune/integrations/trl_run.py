"""TRL's trainers with DeepSpeed, as scripts use them, on completions that do not depend on the weights.

    python -m tests.support.zftune.integrations.trl_run TRAINERS STAGE FOLDER NAME

TRAINERS are names in `TRAINERS`, with commas between them. FOLDER/model holds the model, which is loaded as scripts do.
FOLDER/NAME.RANK.pt then holds {trainer: losses, norms of gradients and whole weights, or an error}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

STEPS, BATCH, LR = 4, 4, 2e-3
WORDS, NEW = 60, 5
GENERATIONS = 2


def tokenizer() -> Any:
    """Words w0 to w59 and three of its own."""
    own = ("<pad>", "<s>", "</s>", "<unk>")
    words = {word: number for number, word in enumerate((*own, *(f"w{number}" for number in range(WORDS))))}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), own, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


def texts(count: int, length: int, seed: int) -> list[str]:
    numbers = torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]


def config_of(stage: int) -> dict[str, Any]:
    """Of public examples for TRL, with what the Trainer knows left to it."""
    on_host = {"device": "cpu", "pin_memory": False}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": on_host}
    if stage == 3:
        zero |= {"offload_param": on_host, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }


def common(stage: int, folder: Path) -> dict[str, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    return {
        "output_dir": str(folder / "out"),
        "deepspeed": config_of(stage),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // ranks,
        "learning_rate": LR,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) for word in one.split() if word[1:].isdigit()) % 7) for one in completions]


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": texts(STEPS * BATCH, 4, 2)})


def sft(given: dict[str, Any], model: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**given, max_length=16)
    data = Dataset.from_dict({"text": texts(STEPS * BATCH, 12, 1)})
    return SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer())


def grpo(given: dict[str, Any], model: str) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    own = {"num_generations": GENERATIONS, "max_completion_length": NEW, "beta": 0.1, "num_iterations": 2}
    args = GRPOConfig(**given, **own)
    return GRPOTrainer(
        model=model, args=args, reward_funcs=reward, train_dataset=prompts(), processing_class=tokenizer()
    )


def rloo(given: dict[str, Any], model: str) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    own = {"num_generations": GENERATIONS, "max_completion_length": NEW, "beta": 0.1, "num_iterations": 2}
    args = RLOOConfig(**given, **own)
    return RLOOTrainer(
        model=model, args=args, reward_funcs=reward, train_dataset=prompts(), processing_class=tokenizer()
    )


def online_dpo(given: dict[str, Any], model: str) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(**given, max_new_tokens=NEW, max_length=16)
    return OnlineDPOTrainer(
        model=LlamaForCausalLM.from_pretrained(model),
        ref_model=LlamaForCausalLM.from_pretrained(model),
        args=args,
        reward_funcs=reward,
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )


def ppo(given: dict[str, Any], model: str) -> Any:
    """Of TRL up to 1.12, whose arguments cannot have a ds_config: Accelerate's launcher names it."""
    from transformers import LlamaForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config, path = given["deepspeed"], Path(model).with_name(f"ppo.{os.environ['RANK']}.json")
    del config["optimizer"]
    micro_batch = given["per_device_train_batch_size"]
    own = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": 0.5}
    path.write_text(json.dumps({**config, **own, "zero_allow_untested_optimizer": True}))
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path))
    args = PPOConfig(
        **{name: value for name, value in given.items() if name not in ("deepspeed", "max_steps")},
        response_length=NEW,
        num_ppo_epochs=2,
        num_mini_batches=1,
        num_sample_generations=0,
        total_episodes=STEPS * BATCH,
    )
    data = Dataset.from_dict({"input_ids": tokenizer()(texts(STEPS * BATCH, 4, 2))["input_ids"]})
    policy, reference = (LlamaForCausalLM.from_pretrained(model) for _ in range(2))
    value, judge = (LlamaForSequenceClassification.from_pretrained(model, num_labels=1) for _ in range(2))
    return PPOTrainer(
        args=args,
        processing_class=tokenizer(),
        model=policy,
        ref_model=reference,
        reward_model=judge,
        value_model=value,
        train_dataset=data,
        eval_dataset=data,
    )


TRAINERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "SFT": sft,
    "GRPO": grpo,
    "RLOO": rloo,
    "OnlineDPO": online_dpo,
    "PPO": ppo,
}


def fix_completions() -> None:
    """Let models generate as they do, and return other tokens, the same ones in each run."""
    from transformers import GenerationMixin

    made = torch.Generator().manual_seed(5 + int(os.environ["RANK"]))
    original = GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        found = original(self, *args, **kwargs)
        new: Tensor = torch.randint(4, 4 + WORDS, (len(ids), NEW), generator=made)
        sequences = torch.cat([ids, new], dim=1)
        if kwargs.get("return_dict_in_generate"):
            found.sequences = sequences
            return found
        return sequences

    LlamaForCausalLM.generate = generate


def weights_of(model: Any) -> dict[str, Tensor]:
    import deepspeed

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: one.detach().float().clone() for name, one in parameters.items()}


def trained(name: str, stage: int, folder: Path) -> dict[str, Any]:
    set_seed(0)  # of heads that the model's file has not, and of the order of batches
    made = TRAINERS[name](common(stage, folder), str(folder / "model"))
    begun = weights_of(made.model)
    torch.manual_seed(int(os.environ["RANK"]))
    made.train()
    names = ("loss", "loss/policy_avg", "loss/value_avg", "grad_norm")
    log = [[entry[name] for name in names if name in entry] for entry in made.state.log_history]
    return {
        "optimizer": type(made.model_wrapped.optimizer).__name__,
        "losses": [one for one in log if one],
        "begun": begun,
        "weights": weights_of(made.model),
    }


def main() -> None:
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    names, stage, folder, out = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    original = LlamaForCausalLM.generate
    for name in names:
        fix_completions()
        try:
            found[name] = trained(name, stage, folder)
        except Exception:  # noqa: BLE001 - told to the parent
            found[name] = traceback.format_exc()
        LlamaForCausalLM.generate = original
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state()
        torch.save(found, folder / f"{out}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
