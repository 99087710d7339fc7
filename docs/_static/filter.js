// Shows the cards that contain every word of the field above them.
for (const field of document.querySelectorAll("input.filter"))
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const card of field.nextElementSibling.querySelectorAll(".card"))
      card.hidden = !words.every((word) => card.textContent.toLowerCase().includes(word));
  });
