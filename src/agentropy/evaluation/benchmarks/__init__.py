"""Benchmarks by name: one declaration each (`table.py`), read from a file or from the Hugging Face hub (`load.py`)."""
