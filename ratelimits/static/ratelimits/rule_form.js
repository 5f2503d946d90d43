// The rule form: show only the fields of the chosen algorithm and calendar unit. While the user types, update the chart
// and the sentence that describes the rule.
"use strict";
{
  const start = () => {
    const select = document.querySelector("[data-ratelimits-fields]");
    if (!select) return;
    const byAlgorithm = JSON.parse(select.dataset.ratelimitsFields);
    const explanations = JSON.parse(select.dataset.ratelimitsExplanations);
    const unit = document.querySelector("[data-ratelimits-hides]");
    const allFields = new Set(Object.values(byAlgorithm).flat());
    const preview = document.querySelector("[data-ratelimits-preview]");
    const trial = document.querySelector("[data-ratelimits-trial]");
    const explanation = document.createElement("p");
    explanation.className = "ratelimits-explanation";
    explanation.setAttribute("role", "status");
    select.closest(".form-row").append(explanation);
    if (trial && trial.nextElementSibling) trial.nextElementSibling.hidden = true;
    let timer = 0;
    let newestPreview = 0;

    const showFields = () => {
      const fields = new Set(byAlgorithm[select.value] || []);
      const hidden = unit ? JSON.parse(unit.dataset.ratelimitsHides)[unit.value] || [] : [];
      for (const name of hidden) fields.delete(name);
      const fieldsets = new Set();
      for (const name of allFields) {
        const row = document.querySelector(`.form-row.field-${name}`);
        if (!row) continue;
        row.hidden = !fields.has(name);
        fieldsets.add(row.closest("fieldset"));
        // Browsers do not send disabled inputs. So an old value in a hidden field cannot cause an error.
        for (const input of row.querySelectorAll("input, select")) input.disabled = row.hidden;
      }
      for (const fieldset of fieldsets) fieldset.hidden = !fieldset.querySelector(".form-row:not([hidden])");
      explanation.textContent = explanations[select.value] || "";
    };

    // Send the values by POST, with the form's token. So the values are not in a URL.
    const post = (address) => {
      const url = new URL(address, location.href);
      url.searchParams.set("fragment", "1");
      return fetch(url, {method: "POST", body: new FormData(select.form)});
    };

    const updatePreview = async () => {
      const number = ++newestPreview;
      const response = await post(preview.dataset.ratelimitsPreview);
      if (!response.ok || number !== newestPreview) return;
      const answer = await response.json();
      preview.textContent = answer.sentence || Object.values(answer.errors).flat().join(" ");
      if (!trial) return;
      const trialResponse = await post(trial.dataset.ratelimitsTrial);
      const fragment = await trialResponse.text();
      if (!trialResponse.ok || number !== newestPreview) return;
      const open = [...trial.querySelectorAll("details")].map((details) => details.open);
      trial.innerHTML = fragment;
      trial.querySelectorAll("details").forEach((details, index) => { details.open = open[index] || false; });
    };

    const updateSoon = () => {
      if (!preview) return;
      clearTimeout(timer);
      timer = setTimeout(updatePreview, 250);
    };

    // The link of a starting point keeps two kinds of parameters of this page's URL: the plan, and Django's (`_popup`).
    for (const link of document.querySelectorAll("[data-ratelimits-start]")) {
      const parameters = new URLSearchParams(location.search);
      for (const name of [...parameters.keys()]) if (name !== "plan" && !name.startsWith("_")) parameters.delete(name);
      for (const [name, value] of new URL(link.href).searchParams) parameters.set(name, value);
      link.search = parameters;
    }

    select.addEventListener("change", showFields);
    if (unit) unit.addEventListener("change", showFields);
    select.form.addEventListener("input", updateSoon);
    select.form.addEventListener("change", updateSoon);
    showFields();
    if (select.form.querySelector("[name=capacity]").value || select.form.querySelector("[name=rate]").value) updateSoon();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
