"""Agents that play episodes through the Gymnasium API."""
