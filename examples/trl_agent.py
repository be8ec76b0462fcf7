"""A tool-using agent trained in TRL with TAO-RL: a TRL script in which three lines are ours (marked).

    pip install 'agentropy[trl]'
    python examples/trl_agent.py                    # the embedded agent of the facts world, a minute on a laptop's CPU
    python examples/trl_agent.py --model Qwen/Qwen3-0.6B --steps 200        # a model of your own, on a GPU

The tool is a function as TRL wants them, the data set has TRL's columns. docs/trl.md says what works and what does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from agentropy.integrations.trl import AgentropyGRPOTrainer  # 1: instead of GRPOTrainer
from agentropy.tasks.facts import knowledge_base
from agentropy.tasks.worlds import make_world
from agentropy.tools.search import SearchIndex

INDEX = SearchIndex.from_documents(knowledge_base().documents())


def search(query: str) -> str:
    """Search a collection of facts.

    Args:
        query: What to look for.
    """
    return "\n".join(hit.document.text for hit in INDEX.search(query, 2))


def main(arguments: Sequence[str] | None = None) -> Any:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; by default the embedded agent")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="runs/trl-agent")
    options = parser.parse_args(arguments)
    world = make_world("facts")
    tasks = [world.tasks.train(i) for i in range(4 * options.steps)]
    rows = [{"prompt": [{"role": "user", "content": t.question}], "answer": list(t.answers)} for t in tasks]
    embedded = options.model is None
    trainer = AgentropyGRPOTrainer(
        options.model or str(world.warm_start()),
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=128 if embedded else 1024,
            learning_rate=5e-4 if embedded else 1e-6,
            logging_steps=1,
            report_to="none",
            **({"use_cpu": True, "bf16": False} if embedded else {}),
        ),
        train_dataset=Dataset.from_list(rows),
        tools=[search],
        method="tao-rl",  # 2: and its options, such as method_options={"alpha": 0.05}
        grader="f1",  # a grader of ours against the column `answer`; TRL's reward_funcs would do as well
        protocol="tags" if embedded else "hermes",  # 3: how calls look; hermes if nothing is said
    )
    trainer.train()
    trainer.save_model(f"{options.out}/model")
    return trainer


if __name__ == "__main__":
    main()
