"""Everything but the model: servers over workers that compute nothing."""
