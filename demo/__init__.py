"""Eight processes fight over three keys, and a witness that knows nothing of the locks watches them."""
