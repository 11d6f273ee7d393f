"""``arpo/SearchQA-v0``: questions whose answers have to be looked up, with a search and a Python tool."""

from __future__ import annotations

from arpo_env.envs.search_python import SearchPythonEnv

_DOCUMENTS = (
    ("Port Ellery", "Port Ellery is a harbour town on the Sarn coast. Its lighthouse was built in 1871 by the engineer Maud Tarrow."),
    ("Maud Tarrow", "Maud Tarrow (born 1832 in Grenwick) was an engineer. She built the lighthouse of Port Ellery and the bridge over the Ilde."),
    ("Ilde bridge", "The bridge over the Ilde was opened in 1880. It has nine arches and is 412 metres long."),
    ("Grenwick", "Grenwick is a market town in the hills above the Ilde. In 1900 it had 5,240 inhabitants; its river is the Little Ilde."),
    ("Orrin Vale", "Orrin Vale (1860 to 1931) was a composer from Port Ellery. His only opera, The Salt Clock, was first given in 1894."),
    ("The Salt Clock", "The Salt Clock is an opera in three acts by Orrin Vale. Its heroine is the keeper of a lighthouse."),
    ("Sarn coast", "The Sarn coast has two harbour towns, Port Ellery in the north and Dunmarrow in the south. Dunmarrow had 3,115 inhabitants in 1900."),
)


class SearchQAEnv(SearchPythonEnv):
    """Question answering: token F1 against the reference answers inside the paper's hierarchical reward."""

    documents = tuple({"title": title, "text": text} for title, text in _DOCUMENTS)
    rows = (
        {"id": "ellery-lighthouse", "question": "Who built the lighthouse of Port Ellery?", "answer": "Maud Tarrow"},
        {"id": "builder-birthplace", "question": "In which town was the builder of the Port Ellery lighthouse born?", "answer": "Grenwick"},
        {"id": "opera-composer", "question": "Which composer wrote the opera The Salt Clock?", "answer": ["Orrin Vale", "Vale"]},
        {"id": "years-between", "question": "How many years after the lighthouse of Port Ellery was built was The Salt Clock first given?", "answer": "23"},
        {"id": "two-towns", "question": "How many inhabitants did Grenwick and Dunmarrow have together in 1900?", "answer": "8355"},
    )
    ability = "qa"
