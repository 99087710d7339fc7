"""What the comparisons with other software share: it is quiet, uses one thread, and `peer_bounds` can be imported."""

import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # everything here is tiny: threads would only wait for each other
sys.path.insert(0, os.path.dirname(__file__))

import onnx  # noqa: E402, F401  # missing software is an error here, so that nothing is skipped without a word
import torch  # noqa: E402, F401
import transformers  # noqa: E402, F401
