"""vLLM servers, started by lgrpo or by the user."""
