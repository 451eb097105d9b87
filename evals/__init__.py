"""Asks questions with known answers, through lm-eval, over any endpoint."""
