"""ARPO's sampling under other libraries' trainers. One library a file, imported by the user: ``from arpo_algo.interop.trl import rollout_func``."""
