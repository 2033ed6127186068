"""What everything but the model can do: servers over workers that compute nothing."""
