"""Rows of other forms: conversations, pairs, tables, mixtures, the hub."""
