"""``/v1/audio``: transcripts and translations of speech, from forms with a file."""
