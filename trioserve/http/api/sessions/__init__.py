"""SGLang's sessions: opening, closing, and the turns of a session."""
