"""Coverage-guided fuzzing of everything that strangers and peers can send."""
