"""Training with torch's own parallel API."""
