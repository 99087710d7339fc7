"""What the comparisons with other software share: it is quiet, uses one thread, and `peer_bounds` can be imported."""

import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # everything here is tiny: threads would only wait for each other
sys.path.insert(0, os.path.dirname(__file__))

import pytest  # noqa: E402

try:  # missing software is an error here, so that nothing is skipped without a word
    import onnx  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise pytest.UsageError(f"tests/peers needs the package {error.name}, and more: tox -e peers") from error
