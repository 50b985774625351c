"""Makes an exported model of a trained run: programs, tables, vocabularies, and a check that they score alike."""
