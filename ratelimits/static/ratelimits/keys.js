// Inputs for keys: suggest known keys. The typed text is a part of the key or of its name.
"use strict";
{
  const WAIT = 250; // milliseconds between the last typed letter and the search

  const suggest = (input) => {
    const list = document.getElementById(input.getAttribute("list"));
    let timer = 0;
    let newestSearch = 0;

    const fill = async () => {
      const text = input.value.trim();
      const search = ++newestSearch;
      if (text.length < 2) return list.replaceChildren();
      const response = await fetch(`${input.dataset.ratelimitsKeys}?q=${encodeURIComponent(text)}`);
      if (!response.ok || search !== newestSearch) return;
      const { keys } = await response.json();
      list.replaceChildren(...keys.map(([key, name]) => {
        const option = document.createElement("option");
        option.value = key;
        // Browsers show only options whose value or label contains the typed text. So the label contains the name too.
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
