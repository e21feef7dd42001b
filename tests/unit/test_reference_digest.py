"""The digest by which a resumed run knows its reference and its teachers."""

import torch

from rlox_grpo.reference.protocol import fingerprint_weights


def test_the_digest_of_weights_depends_on_their_values_alone():
    """It is the same for another storage, dtype and order of summation, and another for a changed sign or bit."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 500, generator=generator).bfloat16()

    def digest(value, name="w"):
        return fingerprint_weights([(name, value)])

    same = digest(weight)
    assert digest(weight.float()) == digest(weight.t().contiguous().t()) == same
    flipped, nudged = weight.clone(), weight.float()
    flipped[7, 7] *= -1
    nudged[3, 4] = torch.nextafter(nudged[3, 4], torch.tensor(9.0))
    assert len({same, digest(flipped), digest(nudged), digest(weight, "v"), digest(weight.view(500, 300))}) == 5
    large = torch.randn(2**24 + 5, generator=generator)  # summed in two pieces
    assert digest(large) == digest(large.flip(0))
