"""Tests of models that several ranks compute."""
