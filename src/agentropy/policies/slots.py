"""Which sequence sits in which row of the cache, and whose cache a newcomer can copy instead of computing it again."""

from __future__ import annotations

from collections.abc import Sequence

from agentropy.policies.schedule import LocalSequence, State


class Slots:
    """Rows and their last occupants. A freed row keeps its contents until it is taken, as a source for others to
    copy."""

    def __init__(self, n: int) -> None:
        self._rows: list[LocalSequence | None] = [None] * n
        self._free = set(range(n))
        self._stopped: list[int] = []

    def reset(self) -> None:
        """All rows are free and empty."""
        self._rows = [None] * len(self._rows)
        self._free = set(range(len(self._rows)))
        self._stopped = []

    def owner(self, row: int) -> LocalSequence:
        sequence = self._rows[row]
        assert sequence is not None
        return sequence

    def free(self, sequence: LocalSequence) -> None:
        if sequence.row is not None:
            self._free.add(sequence.row)
            if sequence.cancelled:
                self._stopped.append(sequence.row)
            sequence.row = None

    def take_stopped(self) -> list[int]:
        """Rows freed while they were being decoded, since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def room_for(self, queued: Sequence[LocalSequence]) -> list[LocalSequence]:
        """The sequences that have a row, and the first of the others for whom there are free rows."""
        room = len(self._free)
        admitted = []
        for sequence in queued:
            if sequence.row is None:
                if room == 0:
                    continue
                room -= 1
            admitted.append(sequence)
        return admitted

    def swap(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The contents of these rows have been exchanged."""
        for a, b in pairs:
            rows, free = self._rows, self._free
            rows[a], rows[b] = rows[b], rows[a]
            if (a in free) != (b in free):
                free ^= {a, b}
            for row in (a, b):
                sequence = rows[row]
                if sequence is not None and row not in free:
                    sequence.row = row

    def place(
        self, sequences: Sequence[LocalSequence]
    ) -> tuple[list[LocalSequence], list[tuple[int, int, int]], list[LocalSequence]]:
        """Give rows to sequences that have none, and set how much of their tokens the row's cache will hold.

        Returns:
            Those that can start now; the copies `(source row, target row, columns)` to make before; and those that
            should wait for one of the first to be prefilled, since they will copy from it.
        """
        placed: list[LocalSequence] = []
        copies: list[tuple[int, int, int]] = []
        waiting: list[LocalSequence] = []
        not_yet_written: set[int] = set()
        prefilling: set[int] = set()
        for sequence in sequences:
            if sequence.row is None:
                source, columns = self._source(sequence, not_yet_written)
                if columns == 0 and len(sequence.tokens) > 1 and id(sequence.group) in prefilling:
                    waiting.append(sequence)
                    continue
                row = self._take(sequence, source)
                if source is not None and source != row:
                    copies.append((source, row, columns))
                    not_yet_written.add(row)
                elif source is None:
                    prefilling.add(id(sequence.group))
                    not_yet_written.add(row)
                sequence.cached = columns
            placed.append(sequence)
        return placed, copies, waiting

    def _source(self, sequence: LocalSequence, excluded: set[int]) -> tuple[int | None, int]:
        """The row that holds the longest prefix of the sequence (all but its last token at most), free rows
        preferred."""
        best, best_columns = None, 0
        for row, other in enumerate(self._rows):
            if other is None or other.group is not sequence.group or row in excluded:
                continue
            columns = common_prefix(sequence.tokens, other.tokens, min(other.cached, len(sequence.tokens) - 1))
            if columns > best_columns or (columns == best_columns > 0 and row in self._free and best not in self._free):
                best, best_columns = row, columns
        return best, best_columns

    def _take(self, sequence: LocalSequence, source: int | None) -> int:
        if source is not None and source in self._free:
            row = source
        else:
            row = min(self._free, key=lambda r: (self._still_useful(r), r))
        self._free.discard(row)
        self._rows[row] = sequence
        sequence.row = row
        return row

    def _still_useful(self, row: int) -> bool:
        other = self._rows[row]
        return other is not None and other.state is State.CLOSED and other.group.open > 0


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
