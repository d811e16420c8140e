"""Load for any server that speaks OpenAI's protocol, and what it was like to be its client."""
