"""Tune DeepSpeed's own ZenFlow by restarting a training command: Optuna over `zftune profile --json -- CMD`.

python examples/tune_by_restarts.py ds_config.json --trials 12 -- deepspeed train.py --deepspeed ds_config.json

Each trial writes a copy of ds_config.json with other settings and runs the command with the copy's path in place of
ds_config.json. The first trial has the settings of the file. Only speed is compared, not the loss.
The command must not save checkpoints or upload anything within its first steps: each trial runs in its directory.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna

CHOICES = {"topk_ratio": [0.05, 0.1, 0.2], "update_interval": [2, 4, 8, 16], "overlap_step": [True, False]}
WARM_UP = 2  # steps before the first window

parser = argparse.ArgumentParser(usage="%(prog)s CONFIG [options] -- CMD")
parser.add_argument("config", help="the ds_config.json that the command names")
parser.add_argument("--trials", type=int, default=12)
parser.add_argument("--steps", type=int, default=32, help="steps to measure, at least two windows")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", help="where to write the fastest ds_config")
end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
args, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
if args.config not in command:
    parser.error(f"the command must name {args.config}")
base = json.loads(Path(args.config).read_text(encoding="utf-8"))
begun = base.get("zero_optimization", {}).get("zenflow", {})


def with_settings(settings):
    """The ds_config with these settings of ZenFlow."""
    config = copy.deepcopy(base)
    selection = {"select_strategy": "step", "select_interval": 4 * settings["update_interval"]}
    config.setdefault("zero_optimization", {})["zenflow"] = {
        **begun, **selection, "full_warm_up_rounds": WARM_UP, **settings,
    }  # fmt: skip
    return config


def step_ms(config, window):
    """Mean time of a step of the command; None: it failed."""
    steps = -(-max(args.steps, 2 * window) // window) * window
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder, "ds_config.json"), Path(folder, "profile.json")
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        run = [str(path) if word == args.config else word for word in command]
        profile = ["zftune", "profile", "--stop", "--warmup", str(WARM_UP + window), "--steps", str(steps), "--json"]
        done = subprocess.run([*profile, str(result), "--", *run], capture_output=True, text=True, check=False)
        if not result.exists():
            print("\n".join((done.stdout + done.stderr).splitlines()[-5:]), file=sys.stderr)
            return None
        measured = json.loads(result.read_text(encoding="utf-8"))
        return measured["step_ms"]["mean"] if measured["steps"]["measured"] == steps else None


def objective(trial):
    """Run one setting."""
    settings = {name: trial.suggest_categorical(name, choices) for name, choices in CHOICES.items()}
    began = time.perf_counter()
    found = step_ms(with_settings(settings), settings["update_interval"])
    shown = "failed" if found is None else f"{found:.1f} ms a step"
    print(f"trial {trial.number}: {settings}: {shown} ({time.perf_counter() - began:.0f} s)", flush=True)
    if found is None:
        raise optuna.TrialPruned
    return found


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=args.seed))
if all(begun.get(name) in choices for name, choices in CHOICES.items()):
    study.enqueue_trial({name: begun[name] for name in CHOICES})
study.optimize(objective, n_trials=args.trials)
if not any(trial.value is not None for trial in study.trials):
    sys.exit("no trial could be measured")
best = with_settings(study.best_params)
print(f"fastest: {study.best_value:.1f} ms a step with {study.best_params}")
if args.output:
    Path(args.output).write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
