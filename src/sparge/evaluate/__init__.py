"""Measuring what sparse attention does: synthetic inputs, error and recall, pictures and reports."""
