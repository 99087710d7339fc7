"""The other encodings against Hugging Face transformers: T5's buckets, ALiBi's slopes and bias."""

import numpy as np
import pytest

from pyrope import encodings

torch = pytest.importorskip("torch")
t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (32, 256), (64, 128), (16, 64), (20, 100)])
def test_t5_buckets(causal, buckets, max_distance):
    distances = np.arange(-3000, 3001)
    theirs = t5.T5Attention._relative_position_bucket(
        torch.tensor(distances), bidirectional=not causal, num_buckets=buckets, max_distance=max_distance
    )
    ours = encodings.t5_buckets(distances, causal=causal, buckets=buckets, max_distance=max_distance)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("h", [1, 2, 3, 5, 8, 12, 16, 25, 64, 112])
def test_alibi(h):
    n = 9
    theirs = bloom.build_alibi_tensor(torch.ones(1, n), h, torch.float32).reshape(h, 1, n).double().numpy()
    ours = encodings.alibi_bias(h, [n - 1], range(n))
    # Theirs is slope·j, which in a softmax is the same as −slope·(i − j): the two differ by a constant of the row.
    np.testing.assert_allclose(ours - ours[..., :1], theirs, rtol=1e-6)
