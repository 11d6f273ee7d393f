"""Environments under other libraries' roofs and theirs under ours. One library a file, imported by the user: ``from arpo_env.interop.trl import dataset``."""
