"""Losses on preferences, one file each."""
