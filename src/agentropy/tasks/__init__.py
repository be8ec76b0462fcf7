"""Where questions come from: generated worlds, files, Hugging Face data sets, reasoning-gym."""

from __future__ import annotations

from agentropy.tasks.base import Split, Task, TaskSource
from agentropy.tasks.files import load_tasks
from agentropy.tasks.worlds import WORLDS, World, make_world, warm_start_path

__all__ = ["WORLDS", "Split", "Task", "TaskSource", "World", "load_tasks", "make_world", "warm_start_path"]
