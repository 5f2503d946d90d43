// Inputs for keys: suggest known keys that have the typed text in them or in their name.
"use strict";
{
  const WAIT = 250; // milliseconds after the last letter

  const suggest = (input) => {
    const list = document.getElementById(input.getAttribute("list"));
    let timer = 0;
    let newest = 0;

    const fill = async () => {
      const text = input.value.trim();
      const mine = ++newest;
      if (text.length < 2) return list.replaceChildren();
      const response = await fetch(`${input.dataset.ratelimitsKeys}?q=${encodeURIComponent(text)}`);
      if (!response.ok || mine !== newest) return;
      const { keys } = await response.json();
      list.replaceChildren(...keys.map(([key, name]) => {
        const option = document.createElement("option");
        option.value = key;
        // Browsers filter by value and label: the label has the text that a name was found by.
        option.label = name ? `${key} (${name})` : key;
        return option;
      }));
    };

    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => fill().catch(() => {}), WAIT);
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("input[data-ratelimits-keys]").forEach(suggest);
  });
}
