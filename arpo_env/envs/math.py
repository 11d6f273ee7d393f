"""``arpo/Math-v0``: problems with an exact answer, with a search and a Python tool. Grading needs ``pip install 'arpo[math]'``."""

from __future__ import annotations

from arpo_env.envs.search_python import SearchPythonEnv

_DOCUMENTS = (
    ("Tarrow sum", "The Tarrow sum of a whole number is the sum of the squares of its decimal digits. The Tarrow sum of 35 is 9 + 25 = 34."),
    ("Ilde triangle", "An Ilde triangle is a right triangle whose sides are whole numbers and whose shortest side is a prime number."),
    ("Vale sequence", "The Vale sequence begins 1, 3; every later term is the sum of the two before it plus 1: 1, 3, 5, 9, 15."),
)


class MathEnv(SearchPythonEnv):
    """Mathematics: equality of the answer with the reference as mathematics, inside the paper's hierarchical reward."""

    documents = tuple({"title": title, "text": text} for title, text in _DOCUMENTS)
    rows = (
        {"id": "tarrow-sum", "question": "What is the Tarrow sum of 2^50?", "answer": "514"},
        {"id": "vale-term", "question": "What is the 20th term of the Vale sequence?", "answer": "21891"},
        {"id": "ilde-triangles", "question": "How many Ilde triangles have a longest side below 100?", "answer": "5"},
        {"id": "half-sum", "question": "What is 1/3 + 1/6, as a fraction in lowest terms?", "answer": "\\frac{1}{2}"},
        {"id": "roots", "question": "What is the larger root of x^2 - 4x + 1 = 0?", "answer": "2+\\sqrt{3}"},
    )
    ability = "math"
