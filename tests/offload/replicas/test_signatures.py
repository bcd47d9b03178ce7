"""Test the prediction of experts from n-grams."""

from __future__ import annotations

import numpy as np

from moeinf.offload.replicas.route_keys import grams
from moeinf.offload.replicas.signatures import Signatures

LAW = np.array([[9, 1, 0, 0], [0, 8, 2, 0]])
CODE = np.array([[0, 0, 1, 9], [5, 0, 0, 5]])


def learned() -> Signatures:
    found = Signatures(2, 4)
    for n in range(6):
        found.learn(grams(["the", "court", f"a{n}"]), LAW)
        found.learn(grams(["the", "function", f"b{n}"]), CODE)
    return found


def test_a_prompt_has_the_signature_of_those_that_shared_its_words() -> None:
    found = learned()
    assert len(found) == 2
    law = found.predict(grams(["the", "court", "said"]))
    code = found.predict(grams(["a", "function"]))
    assert law is not None
    assert code is not None
    np.testing.assert_allclose(law.reshape(2, 4), LAW / 10, atol=0.02)
    np.testing.assert_allclose(code.reshape(2, 4), CODE / 10, atol=0.02)


def test_words_that_all_prompts_share_tell_nothing() -> None:
    found = learned().predict(grams(["the"]))
    assert found is not None
    np.testing.assert_allclose(found.reshape(2, 4), (LAW + CODE) / 20, atol=1e-6)


def test_an_unknown_prompt_has_no_signature() -> None:
    assert Signatures(2, 4).predict(grams(["the"])) is None
    assert learned().predict(grams(["zebra"])) is None


def test_a_full_table_adds_to_the_nearest_centroid() -> None:
    found = Signatures(1, 3, most=2)
    assert found.learn(grams(["a"]), np.array([[1, 0, 0]])) == 0
    assert found.learn(grams(["b"]), np.array([[0, 1, 0]])) == 1
    assert found.learn(grams(["c"]), np.array([[2, 1, 0]])) == 0
    np.testing.assert_allclose(found.centroids[0], [5 / 6, 1 / 6, 0], atol=1e-6)
    assert len(found) == 2
