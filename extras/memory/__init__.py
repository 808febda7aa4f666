"""What is traded for memory: --memory."""
