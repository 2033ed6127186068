"""SGLang's sessions: opening and closing them, and the turns that requests are."""
