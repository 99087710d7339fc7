"""What the comparisons with other software share: it is quiet, uses one thread, and `theirs` can be imported."""

import importlib.util
import os
import sys

import optional
import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # everything here is tiny: threads would only wait for each other
sys.path.insert(0, os.path.dirname(__file__))

# Missing software is an error here, so that nothing is skipped without a word.
if missing := [name for name in optional.PEERS if importlib.util.find_spec(name) is None]:
    raise pytest.UsageError(f"tests/peers needs {', '.join(missing)}: tox -e peers")
