"""How weights get from the policy into vLLM servers."""
