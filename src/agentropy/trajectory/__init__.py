"""Trajectories: what an agent sampled, what its tools answered, and what came of it; JSON Lines in and out.

The file format (`agentropy.trajectory/1`, docs/trajectory.md) is a public interface that other agents write too. A
trajectory holds the token ids as they were sampled; text is only a view. Nothing here knows tensors or models.
"""

from agentropy.trajectory.jsonl import (
    ID_LIMIT,
    SCHEMA,
    TOLERANCE,
    dumps,
    from_json,
    read_jsonl,
    read_numbered,
    to_json,
    write_jsonl,
    write_lines,
)
from agentropy.trajectory.types import (
    ENTROPY_KINDS,
    IDS_KINDS,
    KINDS,
    MODEL_KINDS,
    STATUSES,
    STOPS,
    EntropyKind,
    IdsKind,
    Segment,
    SegmentKind,
    Status,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    check_results,
)

__all__ = [
    "ENTROPY_KINDS",
    "IDS_KINDS",
    "ID_LIMIT",
    "KINDS",
    "MODEL_KINDS",
    "SCHEMA",
    "STATUSES",
    "STOPS",
    "TOLERANCE",
    "EntropyKind",
    "IdsKind",
    "Segment",
    "SegmentKind",
    "Status",
    "StopReason",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "check_results",
    "dumps",
    "from_json",
    "read_jsonl",
    "read_numbered",
    "to_json",
    "write_jsonl",
    "write_lines",
]
