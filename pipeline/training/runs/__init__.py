"""What run folders say, read without the ranks that wrote them: listing, comparing and reporting runs."""
