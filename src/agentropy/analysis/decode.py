"""The text of token ids, for sources that hold ids alone."""

from __future__ import annotations

from pathlib import Path

from agentropy.analysis.effects import Decode


def decoder(path: Path | str, model: Path | str | None = None) -> Decode | None:
    """A function from ids to text with the tokenizer of a run directory, or of the run that a file lies in.

    Args:
        model: a folder with another tokenizer.
    Returns: None where there is no tokenizer. Raises UserError for one that does not load.
    """
    from agentropy.analysis.report.tokens import TokenBytes, find_tokenizer, tokenizer_places

    if model is not None:
        return TokenBytes(find_tokenizer(Path(model))).text
    place = Path(path).resolve()
    for directory in (place, place.parent, place.parent.parent):
        if found := tokenizer_places(directory):
            return TokenBytes(find_tokenizer(found[0])).text
    return None
