"""Train or evaluate the bundled model.

python -m kvlab.training                 make the model (stop it at will, call again to resume)
python -m kvlab.training --evaluate      print what the bundled model can do
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "passphrase"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvlab.training", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/training"), help="state of the run"
    )
    parser.add_argument("--output", type=Path, default=BUNDLED, help="folder of the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all; 1 will do)")
    parser.add_argument("--evaluate", action="store_true", help="print the table, train nothing")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="with --evaluate: its folder")
    parser.add_argument("--json", type=Path, help="with --evaluate: write the rows to this file")
    parser.add_argument("--questions", type=int, default=200, help="with --evaluate: per task")
    parser.add_argument("--evaluation-seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.evaluate:
        return report(options)

    from kvlab.training.train import Plan, train
    from kvlab.training.write import write_card, write_model

    plan = Plan(seed=options.seed)
    model = train(options.work, plan)
    write_model(model, options.output, options.work, plan)
    options.model = options.output
    table = measure(options)
    write_card(options.output, table, options.evaluation_seed)
    print(f"The model and its card are in {options.output}.")
    return 0


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Evaluate a model and print the table."""
    from kvlab.models import load_model
    from kvlab.training.evaluate import evaluate

    loaded = load_model(str(options.model))
    table = evaluate(loaded.model, loaded.tokenizer, options.evaluation_seed, options.questions)
    print(table.to_string(index=False))
    if options.json:
        options.json.write_text(table.to_json(orient="records", indent=1, force_ascii=False) + "\n")
    return table


def report(options: argparse.Namespace) -> int:
    """Print the table; 1 if a required row was missed."""
    table = measure(options)
    missed = table[table["correct"] < table["must"] * table["n"]]
    print(f"{len(missed)} of {table['must'].notna().sum()} required rows missed.")
    return int(len(missed) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
